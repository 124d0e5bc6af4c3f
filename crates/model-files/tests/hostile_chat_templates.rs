//! Chat templates that want to break their host: those that minijinja can bound end with a typed error, on a small stack.

#![forbid(unsafe_code)]

use std::path::Path;
use std::time::SystemTime;

use model_files::chat_template::{ChatTemplate, ChatTemplateError, Conversation};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Map, Value, json};

/// Half of what threads have by default.
const STACK_BYTES: usize = 1 << 20;
/// The texts of this test are much smaller; 10 ** 9 bytes would not be.
const PEAK_KIB_MAX: u64 = 512 << 10;

fn template(folder: &Path, source: &str) -> Result<ChatTemplate, ChatTemplateError> {
    std::fs::write(folder.join("chat_template.jinja"), source).expect("the folder takes a file");
    ChatTemplate::from_folder(folder)
}

fn render(source: &str, messages: &[Value]) -> Result<String, ChatTemplateError> {
    let folder = tempfile::tempdir().expect("a folder");
    std::thread::scope(|scope| {
        let run = || {
            template(folder.path(), source)?.render_conversation(&Conversation {
                messages,
                variables: &Map::new(),
                add_generation_prompt: true,
                now: SystemTime::UNIX_EPOCH,
            })
        };
        let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
        thread
            .spawn_scoped(scope, run)
            .expect("a thread")
            .join()
            .expect("a template made its host panic")
    })
}

/// The most memory that this process ever had, in KiB.
fn peak_kib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Runs `body` a million times.
fn often(body: &str) -> String {
    format!("{{% for a in range(1000) %}}{{% for b in range(1000) %}}{body}{{% endfor %}}{{% endfor %}}")
}

#[test]
fn greedy_templates_end_at_a_limit() {
    let doubled = |start: &str, step: &str| {
        format!(
            "{{% set n = namespace(x={start}) %}}{{% for a in range(64) %}}{{% set n.x = {step} %}}{{% endfor %}}{{{{ n.x }}}}"
        )
    };
    let deep_call = format!("{{{{ {}1{} }}}}", "[".repeat(50), "]".repeat(50));
    assert!(render(&deep_call, &[]).is_ok());
    let greedy = [
        // Without end.
        often(&often("{% set x = a * b %}")),
        // Much text.
        often("{{ messages[0].content }}"),
        doubled("'0123456789'", "[n.x, n.x] | join"),
        doubled("'aaaaaaaaaa'", "n.x.replace('aaaaaaaaaa', n.x ~ n.x)"),
        doubled("'aaaaaaaaaa'", "n.x.join([n.x, n.x])"),
        doubled("'{0}{0}'", "n.x.format(n.x)"),
        doubled("'a\\nb'", "n.x | indent(10 ** 9)"),
        "{{ '{:>1000000000}'.format(1) }}".to_owned(),
        "{{ '{:.1000000000f}'.format(1) }}".to_owned(),
        "{{ 'a'.ljust(10 ** 10) }}{{ 'a'.center(10 ** 10) }}{{ '1'.zfill(10 ** 10) }}".to_owned(),
        "{{ 'a' | center(10 ** 10) }}".to_owned(),
        "{{ [[]] | tojson(indent=10 ** 10) }}".to_owned(),
        "{{ '%1000000000d' | format(1) }}{{ '%.1000000000f' | format(1) }}".to_owned(),
        // Many values.
        doubled("[1]", "[n.x, n.x]"),
        doubled("{}", "{'a': n.x, 'b': n.x}"),
        "{{ [1] | batch(10 ** 9, 0) | list }}".to_owned(),
        "{{ [1] | slice(10 ** 9) | list }}".to_owned(),
    ];
    let messages = [json!({"role": "user", "content": "x".repeat(10_000)})];
    for source in &greedy {
        let result = render(source, &messages);
        assert!(
            matches!(result, Err(ChatTemplateError::TooLong)),
            "{source}: {:?}",
            result.map(|text| text.len())
        );
    }
    for refused in [
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
        "{% for x in [[]] recursive %}{{ loop([[]]) }}{% endfor %}",
        "{{ range(10 ** 9) }}",
        "{{ 10 ** 100 }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ '%é' | format(1) }}",
        "{{ x.__class__ }}",
        "{{ [].append(1) }}",
    ] {
        assert!(
            matches!(render(refused, &[]), Err(ChatTemplateError::Render { .. })),
            "{refused}"
        );
    }
    if let Some(peak) = peak_kib() {
        assert!(peak < PEAK_KIB_MAX, "{peak} KiB");
    }
}

/// Each would take hours: what adds nothing was added as often as the template said, and no limit of bytes counts that.
#[test]
fn work_that_adds_nothing_is_not_done() {
    for method in ["ljust", "rjust", "center"] {
        for fill in ["", "ab"] {
            let result = render(&format!("{{{{ 'a'.{method}(10 ** 15, '{fill}') }}}}"), &[]);
            assert!(
                matches!(result, Err(ChatTemplateError::Render { .. })),
                "{method}: {result:?}"
            );
        }
    }
    assert_eq!(render("{{ [] * 10 ** 15 }}{{ '' * 10 ** 15 }}|", &[]).unwrap(), "[]|");
    // Each of the `a` stands behind all of the `b`.
    let stripped = "{% set b = 'b' * 3000000 %}{{ ('a' * 3000000).strip(b ~ 'a') }}|{{ 'ab ba'.strip('ab') }}|";
    assert_eq!(render(stripped, &[]).unwrap(), "| |");
}

#[test]
fn deep_sources_are_refused() {
    let is_refused = |source: &str| {
        let result = render(source, &[]);
        matches!(
            result,
            Err(ChatTemplateError::Compile { .. } | ChatTemplateError::TooLarge { .. })
        )
    };
    let (open, close) = ("(".repeat(100_000), ")".repeat(100_000));
    assert!(is_refused(&format!("{{{{ {open}1{close} }}}}")));
    assert!(is_refused(&"{% if true %}".repeat(20_000)));
    assert!(is_refused(&"{% for a in b %}".repeat(16_000)));
    assert!(is_refused(&"x".repeat((256 << 10) + 1)));
    // minijinja does not count these as depth. The stack of its compiler holds as many as a source may have.
    let fits = |start: &str, link: &str, end: &str| format!("{start}{}{end}", link.repeat((260_000) / link.len()));
    assert_eq!(render(&fits("{{ ", "-", "1 }}"), &[]).unwrap(), "1");
    assert_eq!(render(&fits("{{ 1", "|abs", " }}"), &[]).unwrap(), "1");
    assert_eq!(render(&fits("{{ ", "1 if 1 else ", "1 }}"), &[]).unwrap(), "1");
    assert_eq!(render(&fits("{{ 1", "+0", " }}"), &[]).unwrap(), "1");
    for unknown in [fits("{{ x", ".a", " }}"), fits("{{ x", "()", " }}")] {
        let result = render(&unknown, &[]);
        assert!(matches!(result, Err(ChatTemplateError::Render { .. })), "{result:?}");
    }
    // Long chains are not deep.
    let chain = format!("{{{{ 1{} }}}}", " + 1".repeat(1_000));
    assert_eq!(render(&chain, &[]).unwrap(), "1001");
    let branches = format!("{{% if false %}}{}{{% endif %}}x", "{% elif false %}".repeat(1_000));
    assert_eq!(render(&branches, &[]).unwrap(), "x");
    // Deep messages are as deep as JSON may be.
    let mut deep = json!(1);
    for _ in 0..120 {
        deep = json!([deep]);
    }
    assert!(render("{{ messages | tojson }}{{ messages }}", &[deep]).is_ok());
}

#[test]
fn thousands_of_mutations_never_panic() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/data/chat-templates");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("golden.json")).unwrap()).unwrap();
    let mut sources: Vec<String> = golden["constructs"]
        .as_object()
        .unwrap()
        .values()
        .map(|source| source.as_str().unwrap().to_owned())
        .collect();
    for family in ["llama-3", "mistral", "qwen3", "deepseek-like"] {
        sources.push(std::fs::read_to_string(folder.join(format!("{family}.jinja"))).unwrap());
    }
    let messages = golden["conversations"]["two calls"].as_array().unwrap();
    let mut random = StdRng::seed_from_u64(16);
    let (mut parsed, mut rendered) = (0, 0);
    let written = tempfile::tempdir().unwrap();
    for _ in 0..1_500 {
        let mut source: Vec<char> = sources[random.random_range(0..sources.len())].chars().collect();
        let other: Vec<char> = sources[random.random_range(0..sources.len())].chars().collect();
        for _ in 0..random.random_range(1..4) {
            let at = random.random_range(0..source.len());
            let end = (at + random.random_range(1..8)).min(source.len());
            let from = random.random_range(0..other.len());
            let piece = other[from..(from + random.random_range(0..12)).min(other.len())].to_vec();
            match random.random_range(0..4) {
                0 => drop(source.splice(at..end, [])),
                1 => drop(source.splice(at..at, piece)),
                2 => drop(source.splice(at..end, piece)),
                _ => source[at] = random.random_range('\0'..'\u{ff}'),
            }
            if source.is_empty() {
                source.push('x');
            }
        }
        let source: String = source.into_iter().collect();
        if let Ok(template) = template(written.path(), &source) {
            parsed += 1;
            let conversation = Conversation {
                messages,
                variables: &Map::new(),
                add_generation_prompt: true,
                now: SystemTime::UNIX_EPOCH,
            };
            rendered += usize::from(template.render_conversation(&conversation).is_ok());
        }
    }
    // Enough of them get far enough to be worth the while.
    assert!(parsed > 200 && rendered > 80, "{parsed} {rendered}");
}
