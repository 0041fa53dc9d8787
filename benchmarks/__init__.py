"""What Safepoint costs, measured beside something else in the same run. `python -m benchmarks --help`; README.md says how."""
