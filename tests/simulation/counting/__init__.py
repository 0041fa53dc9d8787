"""The resources server of the simulation, in a folder of its own as a Gym server has it."""
