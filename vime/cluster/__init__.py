"""Ray, and only here: where processes run, actors around the plain classes, and how they are told to end."""
