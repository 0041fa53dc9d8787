"""Stands in for NeMo Gym in the servers of the fault matrix: the two classes that the gate hooks, and nothing else."""
