"""Command line programs: `python -m experiments.<name>`."""
