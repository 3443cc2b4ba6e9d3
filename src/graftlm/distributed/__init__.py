"""The layers of one model over several processes, on Ray or in this process for tests."""
