"""What kvfleet costs on your machines, each figure beside the floor it stands on."""
