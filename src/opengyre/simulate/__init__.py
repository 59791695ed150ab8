"""Whole runs in seconds: workload models or recorded runs, a cost model of cells, the same policies as live."""
