"""One command for each number and picture of the documentation; nothing here is imported by the package."""
