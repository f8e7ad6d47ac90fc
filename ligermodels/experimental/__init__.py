"""Operations that no model of the package uses yet. Names in here may change without notice."""
