"""Services of the machine: GPU leases, time and memory, progress, imports and plugins."""
