"""What families and everything above them are made of."""
