"""What no model of the package uses yet; names in here may change without notice."""
