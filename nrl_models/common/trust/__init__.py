"""What is not this library's: servers and their keys, links that leave a directory, directories of somebody else."""
