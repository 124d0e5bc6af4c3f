//! The most memory that a chat template can take: each greedy template in a process of its own, at most 64 MiB and four times its input.

#![forbid(unsafe_code)]

use std::process::Command;
use std::time::SystemTime;

use model_files::chat_template::{ChatTemplate, ChatTemplateError, Conversation};
use serde_json::{Map, Value, json};

const PEAK_EXTRA_BYTES: u64 = 64 << 20;
const PEAK_FACTOR: u64 = 4;
/// Enough for a leak of a long text to show.
const RENDERINGS: usize = 30;
/// Names the case and the input to the child process.
const CASE: &str = "BATON_TEMPLATE_CASE";
const INPUT_BYTES: &str = "BATON_TEMPLATE_INPUT_BYTES";

/// Sets `n.x` to `start`, then 100,000 times to `step`.
fn grown(start: &str, step: &str) -> String {
    format!(
        "{{% set n = namespace(x={start}) %}}{{% for a in range(100000) %}}\
         {{% set n.x = {step} %}}{{% endfor %}}{{{{ n.x }}}}"
    )
}

/// Keeps `value` forty times in each of many lists, which hold each other.
fn kept(value: &str) -> String {
    grown("[]", &format!("[n.x, {}]", format!("{value}, ").repeat(40)))
}

/// Prints a list of many items that is deep, so that `pprint` puts much white space before each of them.
fn printed(value: &str) -> String {
    format!(
        "{{% set n = namespace(x=[1] * 6000) %}}{{% for a in range(150) %}}{{% set n.x = [n.x] %}}{{% endfor %}}\
         {{% set x = n.x %}}{{{{ {value} }}}}"
    )
}

/// Keeps a long text in a loop.
fn leaking(call: &str) -> String {
    format!("{{% for a in ['x' * 4000000] %}}{{{{ {call} }}}}{{% endfor %}}")
}

fn cases() -> Vec<String> {
    let straight = |start: &str, step: &str| format!("{{% set x = {start} %}}{}{{{{ x }}}}", step.repeat(5_000));
    vec![
        straight("'aaaaaaaa'", "{% set x = x + x %}"),
        straight("[1]", "{% set x = x + x %}"),
        straight("[1]", "{% set x = [x] %}"),
        straight("messages[0].content", "{% set x %}{{ x }}{{ x }}{% endset %}"),
        "{{ 'a' * 10 ** 8 }}".to_owned(),
        format!("{{% set x = [{}] %}}", "'a' * 100000000, ".repeat(1_000)),
        "{% set x = [1] * 10 ** 8 %}{{ x | list | length }}".to_owned(),
        "{% set x %}{% for a in range(100000) %}{% for b in range(1000) %}0123456789{% endfor %}{% endfor %}{% endset %}".to_owned(),
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='aaaa') %}\
         {% for a in range(64) %}{% set n.x = m(n.x) %}{% endfor %}"
            .to_owned(),
        "{% for a in range(100000) %}{% macro m() %}{{ a }}{{ n }}{{ o }}{{ p }}{% endmacro %}{% endfor %}".to_owned(),
        "{% for a in messages[0].content if true %}{{ a }}{% endfor %}".to_owned(),
        grown("'a'", "n.x ~ messages[0].content"),
        grown("'a' * 1000000", "(n.x[::-1] ~ n.x)[1:]"),
        grown("[1]", "[n]"),
        grown("[1]", "n.x | reverse"),
        grown("[1]", "n.x | batch(1) | list"),
        grown("[1]", "[n.x, n.x] | tojson"),
        grown("'a'", "n.x | center(4000000) | list"),
        grown("'<'", "(n.x * 4000000) | escape"),
        grown("'a\\nb'", "n.x | indent(1000000)"),
        grown("'ab'", "n.x | replace('b', 'bbbbbbbb')"),
        grown("'a'", "[n.x, n.x] | join(n.x)"),
        grown("['a']", "(n.x + n.x) | map('upper') | list"),
        grown("1", "messages[0].content | list"),
        grown("1", "messages[0].content.split('x')"),
        grown("1", "messages[0].content | unique | list"),
        grown("1", "strftime_now('%c' * 1000000)"),
        kept("messages[0].content | upper"),
        kept("range(100000) | list"),
        kept("{'a': a, 'b': a, 'c': a}"),
        kept("{'a': a}.items()"),
        kept("[{'b': a}, {'b': 2}] | groupby('b')"),
        "{% set x = namespace(x=1) %}{% set x.x = x %}{{ x }}{{ x | upper }}{{ x ~ '' }}{{ x | tojson }}".to_owned(),
        printed("(x * 20) | pprint"),
        printed("([x] * 30) | map('pprint') | list | length"),
        "{{ ([['a']] * 1000) | map('center', 1000000) | list | length }}".to_owned(),
        "{{ ('x' * 4000000).split(sep='x') | length }}".to_owned(),
        leaking("loop.changed(loop, a)"),
        leaking("loop.changed([loop], a)"),
        leaking("loop.changed(l=loop, a=a)"),
    ]
}

/// The bytes behind a name in `/proc/self/status`.
fn status_bytes(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
    let kib: u64 = line.trim_matches([':', ' ', '\t', 'k', 'B']).parse().expect("a number");
    kib << 10
}

fn render(source: &str, messages: &[Value]) -> Result<String, ChatTemplateError> {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("chat_template.jinja"), source).expect("the folder takes a file");
    ChatTemplate::from_folder(folder.path())?.render_conversation(&Conversation {
        messages,
        variables: &Map::new(),
        add_generation_prompt: true,
        now: SystemTime::UNIX_EPOCH,
    })
}

/// Does nothing unless [`greedy_templates_stay_within_their_memory`] started it.
#[test]
fn one_case() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
    let (Some(case), Some(input_bytes)) = (number(CASE), number(INPUT_BYTES)) else {
        return;
    };
    let messages = [json!({"role": "user", "content": "x y".repeat(input_bytes / 3)})];
    let source = &cases()[case];
    let before = status_bytes("VmRSS");
    // What a loop keeps would outlive the rendering if the loop kept itself.
    for _ in 0..if source.contains("loop.changed") { RENDERINGS } else { 0 } {
        let _ = render(source, &messages);
    }
    let outcome = match render(source, &messages) {
        Ok(text) => format!("{} bytes", text.len()),
        Err(error) => error.to_string(),
    };
    println!("peak={} outcome={outcome}", status_bytes("VmHWM") - before);
}

#[test]
fn greedy_templates_stay_within_their_memory() {
    let own = std::env::current_exe().expect("this program");
    let mut broken = Vec::new();
    for (case, source) in cases().iter().enumerate() {
        // Only a template that reads its input takes more with more of it.
        let sizes: &[u64] = if source.contains("messages") {
            &[300, 3 << 20]
        } else {
            &[300]
        };
        for &input_bytes in sizes {
            let child = Command::new(&own)
                .args(["--exact", "one_case", "--nocapture", "--test-threads=1"])
                .env(CASE, case.to_string())
                .env(INPUT_BYTES, input_bytes.to_string())
                .output()
                .expect("the child starts");
            let said = String::from_utf8_lossy(&child.stdout).into_owned();
            let peak = said
                .split_once("peak=")
                .and_then(|(_, rest)| rest.split(' ').next()?.parse::<u64>().ok());
            if peak.is_none_or(|peak| peak > PEAK_EXTRA_BYTES + PEAK_FACTOR * input_bytes) {
                broken.push(format!(
                    "{input_bytes} bytes, peak {peak:?}: {}",
                    source.chars().take(200).collect::<String>()
                ));
            }
        }
    }
    assert!(broken.is_empty(), "{} broken:\n{}", broken.len(), broken.join("\n"));
}
