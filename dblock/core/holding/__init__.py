"""What this process believes to hold: flows, their holds, and the lease of each."""
