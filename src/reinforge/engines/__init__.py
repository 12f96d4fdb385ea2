"""Floor 2: engines. Each implements `reinforge.core.engine.Engine` and passes tests/contract."""
