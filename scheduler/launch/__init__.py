"""Starting and supervising a job's agents and ranks inside one allocation."""
