"Continuous batching for language models: `LLM` serves many prompts at once, and `SamplingParams` says how each is sampled."
__version__ = "0.1.0"

from importlib import import_module as _import_module

# where each name lives; its module is imported when the name is first asked for, so that `import cbatch` loads no torch
_home = dict(LLM='llm', AsyncLLM='async_engine', SamplingParams='params', EngineConfig='params', RequestOutput='core', CapacityError='params',
             RequestFailed='params', tiny_lm='model', load_model='loading')
__all__ = list(_home)

def __getattr__(name):
    if name not in _home: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(f'{__name__}.{_home[name]}'), name)
    return value

def __dir__(): return sorted({*globals(), *_home})
