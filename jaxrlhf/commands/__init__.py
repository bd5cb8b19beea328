"""The console command `jaxrlhf`, and the commands that prepare runs and machines."""
