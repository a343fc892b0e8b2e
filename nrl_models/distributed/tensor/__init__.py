"""What a module becomes whose parameters are divided among ranks."""
