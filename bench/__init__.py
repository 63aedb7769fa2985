"""How fast vime is: each measure alternates vime and a reference on the same work, on this machine, in one run."""
