"""An application that counts the Python files of a folder, one background job for each."""
