"""Services of the machine: GPU leases, imports, console, time and memory, and the origin of results."""
