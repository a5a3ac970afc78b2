"""Building environments and stepping them alike, whatever their vectorization and autoreset mode."""
