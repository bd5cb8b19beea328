"""`python -m jaxrlhf COMMAND`: the console command `jaxrlhf`, where it is not on the path."""

from jaxrlhf.commands.command_line import run

if __name__ == "__main__":
    run()
