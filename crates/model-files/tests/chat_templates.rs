//! Chat templates against transformers' own renderer: the texts of `integration-tests/data/chat-templates/golden.json`.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use model_files::chat_template::{ChatTemplate, ChatTemplateError, Conversation};
use serde_json::{Map, Value};

/// The moment that the script which made the file takes for now: 2000-02-29 13:05:09.
const NOW_SECONDS: u64 = 951_829_509;

/// What minijinja cannot do, or does otherwise: the construct, and why.
const NOT_SUPPORTED: [(&str, &str); 12] = [
    ("macro with rest", "macros have no `varargs` and no `kwargs`"),
    ("unary plus", "its grammar has no `+` in front of a value"),
    ("multiplication by less than none", "`text * -1` is an error"),
    (
        "percent",
        "`%` takes numbers only, and nothing can be hooked into an operator; `| format` does the same",
    ),
    ("percent of expression", "as `percent`"),
    ("escape of eight digits", "its lexer does not know `\\U`"),
    ("rare methods", "nobody wrote them, or they need tables of Unicode"),
    ("format method with repr", "its `format` does not know `!r`"),
    (
        "views printed",
        "`range` and what `keys`, `values` and `items` return print as lists",
    ),
    ("equal keys", "a mapping keeps 1 and true apart"),
    (
        "attr and pprint",
        "`attr` reads items, too; `pprint` breaks lines elsewhere",
    ),
    (
        "private name",
        "it lets a namespace have a name that starts with `_`, which transformers refuses",
    ),
];

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/data/chat-templates")
}

fn template(source: &str, special: &Value) -> Result<ChatTemplate, ChatTemplateError> {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("chat_template.jinja"), source).expect("the folder takes a file");
    std::fs::write(folder.path().join("tokenizer_config.json"), special.to_string()).expect("the folder takes a file");
    ChatTemplate::from_folder(folder.path())
}

fn rendered(golden: &Value, case: &Value) -> Result<String, ChatTemplateError> {
    let name = case["template"].as_str().expect("a text");
    let source = match golden["constructs"][name].as_str() {
        Some(source) => source.to_owned(),
        None => std::fs::read_to_string(data().join(format!("{name}.jinja"))).expect("a template of a family"),
    };
    let conversation = case["conversation"].as_str().expect("a text");
    template(&source, &golden["special"])?.render_conversation(&Conversation {
        messages: golden["conversations"][conversation].as_array().expect("a list"),
        variables: case["variables"].as_object().expect("an object"),
        add_generation_prompt: case["generate"] == true,
        now: SystemTime::UNIX_EPOCH + Duration::from_secs(NOW_SECONDS),
    })
}

#[test]
fn every_template_renders_as_transformers_does() {
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(data().join("golden.json")).unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(golden["constructs"].as_object().unwrap().len() >= 60);
    assert!(cases.len() > 500);
    let (mut wrong, mut not_supported) = (Vec::new(), 0);
    for case in cases {
        let ours = rendered(&golden, case);
        let expected = (case.get("text"), case.get("refused"), case.get("fails"));
        let is_same = match (&ours, expected) {
            (Ok(text), (Some(expected), _, _)) => text == expected,
            (Err(ChatTemplateError::Refused { message }), (_, Some(expected), _)) => message == expected,
            // A failure of Python is one here, too; its words are Python's own.
            (Err(ChatTemplateError::Render { .. } | ChatTemplateError::Compile { .. }), (_, _, Some(_))) => true,
            _ => false,
        };
        let name = case["template"].as_str().unwrap();
        let reason = NOT_SUPPORTED.iter().find(|(construct, _)| *construct == name);
        if let Some((construct, why)) = reason {
            not_supported += 1;
            if is_same {
                wrong.push(format!("{construct} works now, although {why}: take it off the list"));
            }
        } else if !is_same {
            let expected = expected.0.or(expected.1).or(expected.2).map(Value::to_string);
            wrong.push(format!(
                "{} on {} with {}, {}:\n  ours:         {ours:?}\n  transformers: {}",
                case["template"],
                case["conversation"],
                case["variables"].as_object().map_or(0, Map::len),
                case["generate"],
                expected.unwrap_or_default()
            ));
        }
    }
    assert_eq!(not_supported, NOT_SUPPORTED.len());
    assert!(
        wrong.is_empty(),
        "{} of {}:\n{}",
        wrong.len(),
        cases.len(),
        wrong.join("\n")
    );
}
