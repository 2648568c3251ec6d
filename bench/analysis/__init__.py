"""From what a run recorded to what it says. Pure: no process, no clock, no framework."""
