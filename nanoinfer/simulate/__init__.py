"""The real scheduler on a computed clock: start with `simulator.simulate`."""
