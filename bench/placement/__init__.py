"""Simulated comparison of expert placements (Hecate, SmartMoE, FasterMoE, FlexMoE) on recorded or synthetic loads."""
