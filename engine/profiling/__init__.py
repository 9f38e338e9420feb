"""Measures an engine from outside: its steps and its start-up, phase by phase. Costs nothing when it is off."""
