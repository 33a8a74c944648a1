"""Django looks for commands below here."""
