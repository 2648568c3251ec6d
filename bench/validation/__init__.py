"""What proves the harness: planted faults, disturbances, simulations, overhead."""
