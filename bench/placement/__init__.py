"""Placements of experts compared in simulation: Hecate, SmartMoE, FasterMoE, FlexMoE, on recorded or made loads."""
