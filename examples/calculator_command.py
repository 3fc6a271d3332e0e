"""One episode of the calculator as a command: the task on standard input, its reward as the last line printed."""

import json
import os
import sys
import urllib.request

task = json.load(sys.stdin)
messages = [{"role": "user", "content": task["question"]}]
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
for _ in range(10):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    if not text.startswith(">"):
        break
    messages.append({"role": "assistant", "content": text})
    left, operator, right = text[1:].partition("+")
    known = operator and left.isdigit() and right.isdigit()
    messages.append({"role": "user", "content": f"={int(left) + int(right)}" if known else "=?"})
print(float(text == f"A{task['answer']}"))
