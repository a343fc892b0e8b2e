"""What the processes of a world do: each function runs on every rank. One module for each of the tests'."""
