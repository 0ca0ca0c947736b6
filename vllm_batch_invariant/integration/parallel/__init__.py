"""What several workers of one model add and send to each other."""
