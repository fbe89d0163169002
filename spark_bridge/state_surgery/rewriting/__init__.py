"""What is rewritten: the operators, their variables, and the schema of the new rows."""
