"""Names of the built-in environments and of the formats of tool calls, for those who must not
import them.
"""

BUILTIN = {
    "single": "reinforge.envs.single:SingleTurnEnv",
    "guess_number": "reinforge.envs.games:GuessNumber",
    "tools": "reinforge.envs.toolbox:ToolEnv",
    "calculator": "reinforge.envs.toolbox:CalculatorEnv",
}
FOREIGN = {  # `name:what` is an environment of another library
    "reasoning_gym": "reinforge.envs.adapters.reasoning_gym:ReasoningGymEnv",
    "textarena": "reinforge.envs.adapters.textarena:TextArenaEnv",
    "gem": "reinforge.envs.adapters.gem:GemEnv",
    "openenv": "reinforge.envs.adapters.openenv:OpenEnvEnv",
    "verifiers": "reinforge.envs.adapters.verifiers:VerifiersEnv",
    "gymnasium": "reinforge.envs.adapters.gymnasium:GymEnv",
    "trl": "reinforge.envs.adapters.trl:TrlEnv",
    "nemo_rl": "reinforge.envs.adapters.nemo_rl:NemoRlEnv",
    "tinker": "reinforge.envs.adapters.tinker:TinkerEnv",
}
FORMATS = (
    "hermes",
    "llama_json",
    "llama_pythonic",
    "mistral",
    "pythonic",
    "harmony",
    "deepseek",
    "qwen_xml",
    "glm",
    "lfm2",
)
UNSCORED = ("single", "tools")  # environments that give no reward of their own
