"""What a parameter server is made of: what it holds, how that changes, and who may go on."""
