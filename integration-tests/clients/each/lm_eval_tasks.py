"""lm_eval: log likelihoods and generations of small tasks that need no download; the tokenizer is local and, where
offered, remote."""

import json

from rows import FOLDER, MODEL, OFFERED, PROGRAMS, TOKENIZER, URL, tool, write

QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome"], 0),
    ("The capital of Italy is", [" Paris", " Rome"], 1),
    ("Two and two is", [" four", " nine"], 0),
    ("The opposite of hot is", [" cold", " warm"], 0),
    ("A spider has this many legs: ", ["8", "6"], 0),
    ("Water freezes to", [" steam", " ice"], 1),
    ("The sun rises in the", [" east", " west"], 0),
    ("The colour of grass is", [" red", " green"], 1),
]
CHOICE = {
    "task": "small_choice", "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "choices",
    "doc_to_target": "answer", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
}
GENERATE = {
    "task": "small_generate", "output_type": "generate_until", "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}", "generation_kwargs": {"max_gen_toks": 8, "temperature": 0, "until": ["\n"]},
    "metric_list": [{"metric": "exact_match"}],
}


def tasks():
    """The folder with both tasks."""
    folder = FOLDER / "tasks"
    folder.mkdir(exist_ok=True)
    file = folder / "small.jsonl"
    lines = [json.dumps(dict(zip(("question", "choices", "answer"), one, strict=True))) for one in QUESTIONS]
    file.write_text("\n".join(lines) + "\n")
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test"}
    for task in (CHOICE, GENERATE):
        # JSON is YAML.
        (folder / f"{task['task']}.yaml").write_text(json.dumps(task | data))
    return folder


def run(what, model, task, path, count, *more):
    """Runs a task; a failure is the error of all its `count` requests, since lm_eval names none."""
    error, result = None, None
    out = FOLDER / "results" / what.replace(" ", "-").replace(",", "")
    words = ["--model", model, "--tasks", task, "--include_path", folder, "--output_path", out, "--batch_size", "1"]
    arguments = f"model={MODEL},base_url={URL}{path},num_concurrent=2,max_retries=1"
    words += ["--model_args", ",".join([arguments, *more]), *(["--apply_chat_template"] if "chat" in path else [])]
    try:
        tool([PROGRAMS / "lm_eval", *words], 300, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", OPENAI_API_KEY="none")
        newest = max(out.rglob("results*.json"), key=lambda file: file.stat().st_mtime)
        result = json.loads(newest.read_text())["results"][task]
    except Exception as why:  # noqa: BLE001
        error = f"{type(why).__name__}: {why}"[:500]
    for _ in range(count):
        write(what=what, id=None, error=error)
    return {key: value for key, value in (result or {}).items() if isinstance(value, float)}


folder = tasks()
local = f"tokenizer_backend=huggingface,tokenizer={TOKENIZER}"
both = sum(len(choices) for _, choices, _ in QUESTIONS)
choose = ("local-completions", "small_choice", "/v1/completions", both)
generate = ("small_generate", "/v1/completions", len(QUESTIONS))
scores = run("log likelihood, local tokenizer", *choose, local)
print(scores)
run("generation, local tokenizer", "local-completions", *generate, local)
run("generation, chat", "local-chat-completions", "small_generate", "/v1/chat/completions", len(QUESTIONS))
if "/tokenizer_info" in OFFERED:
    remote = run("log likelihood, remote tokenizer", *choose, "tokenizer_backend=remote")
    assert remote == scores, f"{remote} with the remote tokenizer, {scores} with the local one"
