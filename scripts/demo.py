"""`make demo`: two prompts, each without and with n-gram speculation, and the proof that the tokens are equal."""

from __future__ import annotations

import sys

from pilotfish import LLM, SamplingParams
from pilotfish.generate import summary

STORY = """The harbour was quiet that morning. Two boats lay at the pier, and an old man mended a net on the steps. \
A girl came down the hill with a basket of bread. She gave him a loaf, and he told her about the shark he had seen \
as a young man. It was longer than his boat, he said, and in front of it swam a small striped fish that showed it \
the way. The girl laughed. She did not believe in sharks that needed a guide."""
PROMPTS = {
    "edit": f"Repeat the following text word for word, but call the girl Ada:\n\n{STORY}",
    "chat": "Explain in a few sentences why the sky is blue.",
}


def main() -> int:
    print("Loading the model demo (SmolLM2-135M-Instruct; 93 MB are fetched the first time) ...", flush=True)
    llm = LLM("demo", context=2048)
    params = SamplingParams(max_tokens=160)
    same = True
    for name, prompt in PROMPTS.items():
        print(f"\n=== {name}: {prompt.splitlines()[0]}")
        tokens = {}
        for speculation in ("off", "ngram"):
            completion = llm.generate(prompt, params, chat=True, speculation=speculation)[0]
            tokens[speculation] = completion.tokens
            if speculation == "off":
                print(completion.text.strip() + "\n")
            print(f"  --speculation {speculation:5}  {summary(completion)}")
        equal = tokens["off"] == tokens["ngram"]
        same &= equal
        count = len(tokens["off"])
        print(f"  the tokens with and without speculation are {'equal' if equal else 'NOT EQUAL'} ({count} tokens)")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
