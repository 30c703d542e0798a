"""What every room stands on: files, values of fields, names and methods as people write them. Without torch."""
