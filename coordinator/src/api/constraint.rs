//! What the output has to be, in the fields of OpenAI and of vLLM: a JSON schema, a regular expression, one of several texts, rules,
//! or no more than some tokens. At most one field may name a grammar.

use grammar::GrammarError;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use serving_core::ids::{PrefixSalt, TokenId};
use serving_core::request::{OutputConstraint, OutputGrammar};

use super::AppState;
use super::body::Held;
use super::error::ApiError;
use super::forms::{Flag, Id, List, Unsupported, in_vocabulary};
use super::limits::{
    ALLOWED_TOKEN_IDS_MAX, BAD_WORD_BYTES_MAX, BAD_WORDS_MAX, CHOICE_TEXTS_MAX, GRAMMAR_BYTES_MAX, LARK_BYTES_MAX,
    REGEX_BYTES_MAX,
};
use super::long_text::on_text;
use crate::text::{TextError, TextModel};

#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `type`")]
pub struct ResponseFormat {
    r#type: Option<String>,
    json_schema: Option<NamedSchema>,
    #[serde(skip)]
    place: FormatPlace,
}

/// The field that a format stands in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum FormatPlace {
    #[default]
    ResponseFormat,
    /// `/v1/responses`.
    TextFormat,
}

impl FormatPlace {
    /// The names of the format, of its type and of its schema.
    fn names(self) -> [&'static str; 3] {
        match self {
            Self::ResponseFormat => [
                "response_format",
                "response_format.type",
                "response_format.json_schema.schema",
            ],
            Self::TextFormat => ["text.format", "text.format.type", "text.format.schema"],
        }
    }
}

impl ResponseFormat {
    /// The format of a response, whose schema stands beside its type.
    pub fn of_text(r#type: Option<String>, schema: Option<Schema>) -> Self {
        Self {
            r#type,
            json_schema: Some(NamedSchema { schema }),
            place: FormatPlace::TextFormat,
        }
    }
}

/// The name, the description and `strict` change nothing: a schema is always followed.
#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object with `name` and `schema`")]
struct NamedSchema {
    schema: Option<Schema>,
}

/// A JSON schema as it was written: it takes no more memory than its text. vLLM's clients also send it as a string.
pub type Schema = Box<RawValue>;

/// vLLM's `structured_outputs`.
#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "an object")]
pub struct StructuredOutputs {
    json: Option<Schema>,
    json_object: Flag,
    regex: Option<String>,
    choice: Option<Texts>,
    grammar: Option<String>,
    structural_tag: Option<Unsupported>,
    whitespace_pattern: Option<Unsupported>,
}

pub type Texts = List<String, CHOICE_TEXTS_MAX>;

/// The fields of a body that constrain the output.
#[derive(Debug, Default)]
pub struct ConstraintFields {
    pub response_format: Option<ResponseFormat>,
    pub structured_outputs: Option<StructuredOutputs>,
    pub guided_json: Option<Schema>,
    pub guided_regex: Option<String>,
    pub guided_choice: Option<Texts>,
    pub guided_grammar: Option<String>,
    pub allowed_token_ids: Option<List<Id, ALLOWED_TOKEN_IDS_MAX>>,
    pub bad_words: Option<List<String, BAD_WORDS_MAX>>,
    /// Where a call is forced.
    pub tools: Option<OutputGrammar>,
}

/// A constraint whose words are no tokens yet.
#[derive(Debug, Default)]
pub struct GivenConstraint {
    /// With the field that it came from.
    grammar: Option<(&'static str, OutputGrammar)>,
    allowed_tokens: Vec<TokenId>,
    bad_words: Vec<String>,
}

impl ConstraintFields {
    pub fn check(self, vocab_size: u32) -> Result<GivenConstraint, ApiError> {
        let allowed = self.allowed_token_ids;
        if allowed.as_ref().is_some_and(|list| list.0.is_empty()) {
            let message =
                "`allowed_token_ids` is empty, so nothing could be said. Name at least one token, or leave it out.";
            return Err(ApiError::invalid("allowed_token_ids", message));
        }
        let words = self.bad_words.map_or(Vec::new(), |list| list.0);
        if words
            .iter()
            .any(|word| word.is_empty() || word.len() > BAD_WORD_BYTES_MAX)
        {
            let message = format!("Each of `bad_words` must have 1 to {BAD_WORD_BYTES_MAX} bytes.");
            return Err(ApiError::invalid("bad_words", message));
        }
        let structured = self.structured_outputs.unwrap_or_default();
        let choices = [
            ("structured_outputs.choice", &structured.choice),
            ("guided_choice", &self.guided_choice),
        ];
        if let Some((field, _)) = choices
            .iter()
            .find(|(_, texts)| texts.as_ref().is_some_and(|texts| texts.0.is_empty()))
        {
            return Err(ApiError::invalid(field, format!("`{field}` has no text to choose.")));
        }
        let json = |schema: Option<Schema>, field| schema.map(|schema| (field, schema_text(&schema)));
        let found = [
            self.tools.map(|grammar| ("tool_choice", grammar)),
            of_response_format(self.response_format)?,
            json(structured.json, "structured_outputs.json"),
            structured
                .json_object
                .0
                .then(|| ("structured_outputs.json_object", any_object())),
            structured
                .regex
                .map(|text| ("structured_outputs.regex", OutputGrammar::Regex(text.into()))),
            structured
                .choice
                .map(|texts| ("structured_outputs.choice", one_of(&texts.0))),
            structured
                .grammar
                .map(|text| ("structured_outputs.grammar", OutputGrammar::Lark(text.into()))),
            json(self.guided_json, "guided_json"),
            self.guided_regex
                .map(|text| ("guided_regex", OutputGrammar::Regex(text.into()))),
            self.guided_choice.map(|texts| ("guided_choice", one_of(&texts.0))),
            self.guided_grammar
                .map(|text| ("guided_grammar", OutputGrammar::Lark(text.into()))),
        ];
        Ok(GivenConstraint {
            grammar: only_one(found.into_iter().flatten())?,
            allowed_tokens: match allowed {
                Some(ids) => in_vocabulary(ids.0, "allowed_token_ids", vocab_size)?,
                None => Vec::new(),
            },
            bad_words: words,
        })
    }
}

impl GivenConstraint {
    /// Compiles the grammar and turns the words into tokens, away from the threads that others need. Grammars that were compiled
    /// for another salt count as unknown: else the time would say what other tenants send.
    pub async fn prepare(
        self,
        state: &AppState,
        (held, salt): (Held, Option<PrefixSalt>),
    ) -> Result<OutputConstraint, ApiError> {
        let (text, grammars) = (state.text.clone(), state.grammars.clone());
        let bytes = self.bad_words.iter().map(String::len).sum();
        // A grammar is compiled on a blocking thread, however short it is.
        let bytes = if self.grammar.is_some() { usize::MAX } else { bytes };
        let place = match self.grammar.is_some() {
            true => state.compiling.clone().acquire_owned().await.ok(),
            false => None,
        };
        let work = move || {
            // A grammar is compiled to its end, also when its client leaves meanwhile, and keeps its place for as long.
            let _place = place;
            // Kept until its first token has been looked at.
            let _compiled = match &self.grammar {
                Some((field, grammar)) => Some(
                    grammars
                        .compile_for(salt, grammar)
                        .map_err(|error| not_compiled(field, &error))?,
                ),
                None => None,
            };
            let field = self.grammar.as_ref().map_or("allowed_token_ids", |(field, _)| field);
            let words = self.bad_words.iter().map(|word| spellings(&text, word));
            let words: Result<Vec<_>, TextError> = words.collect();
            let words = words.map_err(|error| ApiError::invalid("bad_words", error.to_string()))?;
            let constraint = OutputConstraint {
                grammar: self.grammar.map(|(_, grammar)| grammar),
                allowed_tokens: self.allowed_tokens,
                bad_words: words.into_iter().flatten().collect(),
            };
            match grammar::allows_a_first_token(&grammars, &constraint, text.codec().vocab_size()) {
                true => Ok(constraint),
                false => Err(ApiError::invalid(
                    field,
                    "No token may come first: the grammar, `allowed_token_ids` and `bad_words` rule all out together.",
                )),
            }
        };
        on_text(state, (bytes, held), work).await
    }

    pub fn has_grammar(&self) -> bool {
        self.grammar.is_some()
    }
}

fn not_compiled(field: &str, error: &GrammarError) -> ApiError {
    match error {
        GrammarError::NoThread(_) => ApiError::no_compiler(error),
        GrammarError::Invalid(_) | GrammarError::NoVocabulary(_) | GrammarError::Lost(_) => {
            ApiError::invalid(field, format!("`{field}`: {error}."))
        }
    }
}

fn of_response_format(format: Option<ResponseFormat>) -> Result<Option<(&'static str, OutputGrammar)>, ApiError> {
    let Some(format) = format else { return Ok(None) };
    let [whole, kind, place] = format.place.names();
    match format.r#type.as_deref() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some((whole, any_object()))),
        Some("json_schema") => match format.json_schema.and_then(|named| named.schema) {
            Some(schema) => Ok(Some((place, schema_text(&schema)))),
            None => Err(ApiError::invalid(place, format!("`{place}` is missing."))),
        },
        _ => {
            let message = format!("`{kind}` must be text, json_object or json_schema.");
            Err(ApiError::invalid(kind, message))
        }
    }
}

fn schema_text(schema: &Schema) -> OutputGrammar {
    let in_string = serde_json::from_str::<String>(schema.get());
    OutputGrammar::JsonSchema(match in_string {
        Ok(text) => text.into(),
        Err(_) => schema.get().into(),
    })
}

fn any_object() -> OutputGrammar {
    OutputGrammar::JsonSchema(r#"{"type":"object"}"#.into())
}

fn one_of(texts: &[String]) -> OutputGrammar {
    // A JSON string is a string of Lark, too, but for one character.
    let quoted = |text: &String| Value::from(text.as_str()).to_string().replace('\u{7f}', "\\u007f");
    let texts: Vec<String> = texts.iter().map(quoted).collect();
    OutputGrammar::Lark(format!("start: {}", texts.join(" | ")).into())
}

fn only_one(
    found: impl Iterator<Item = (&'static str, OutputGrammar)>,
) -> Result<Option<(&'static str, OutputGrammar)>, ApiError> {
    let mut only: Option<(&str, _)> = None;
    for (field, grammar) in found {
        if let Some((first, _)) = only {
            let message = format!("`{first}` and `{field}` both say what the output has to be. Send one of them.");
            return Err(ApiError::invalid(field, message));
        }
        let (text, most) = match &grammar {
            OutputGrammar::Regex(text) => (text, REGEX_BYTES_MAX),
            // The rules of a choice are its texts.
            OutputGrammar::Lark(text) if !field.ends_with("choice") => (text, LARK_BYTES_MAX),
            OutputGrammar::JsonSchema(text) | OutputGrammar::Lark(text) => (text, GRAMMAR_BYTES_MAX),
        };
        if text.len() > most {
            let message = format!("`{field}` must have at most {most} bytes, not {}.", text.len());
            return Err(ApiError::invalid(field, message));
        }
        only = Some((field, grammar));
    }
    Ok(only)
}

/// The tokens of a word at the beginning of a text, and after a space, where that is another token. The rule is vLLM's.
fn spellings(text: &TextModel, word: &str) -> Result<Vec<Vec<TokenId>>, TextError> {
    let encode = |word: &str| text.codec().encode(word, false, BAD_WORD_BYTES_MAX + 1);
    let first = encode(word.trim_start())?;
    let after_space = encode(&format!(" {}", word.trim_start()))?;
    let is_new = after_space.first() != first.first() && after_space.len() == first.len();
    let all = [Some(first), is_new.then_some(after_space)];
    Ok(all.into_iter().flatten().filter(|tokens| !tokens.is_empty()).collect())
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::num::NonZeroU32;
    use std::sync::{Mutex, mpsc};
    use std::time::{Duration, Instant};

    use axum::http::StatusCode;
    use grammar::Grammars;
    use tokio::sync::oneshot;

    use super::*;
    use crate::api::error::Retry;
    use crate::api::limits::COMPILED_AT_ONCE;
    use crate::api::tests::{PATIENCE, key, state};
    use crate::keys::file::Limits;

    #[test]
    fn a_grammar_that_no_thread_compiles_is_not_the_clients_mistake() {
        let no_thread = not_compiled("guided_regex", &GrammarError::NoThread(io::ErrorKind::WouldBlock));
        assert_eq!(
            (no_thread.status, no_thread.param),
            (StatusCode::SERVICE_UNAVAILABLE, None)
        );
        assert!(matches!(no_thread.retry, Retry::After(_)));
        assert_eq!(no_thread.outcome, "internal");
        let wrong = not_compiled("guided_regex", &GrammarError::Invalid("it has no end".to_owned()));
        assert_eq!(
            (wrong.status, wrong.param.as_deref()),
            (StatusCode::BAD_REQUEST, Some("guided_regex"))
        );
    }

    #[tokio::test]
    async fn a_grammar_keeps_its_places_until_it_is_compiled_though_its_client_has_gone() {
        let (is_compiling, compiling) = oneshot::channel();
        let (open_gate, gate) = mpsc::sync_channel::<()>(1);
        let at_gate = Mutex::new(Some((is_compiling, gate)));
        let load = move || {
            let (is_compiling, gate) = at_gate.lock().unwrap().take().expect("it is read once");
            is_compiling.send(()).expect("the test waits");
            let _ = gate.recv();
            Err(GrammarError::NoVocabulary("the test has none".to_owned()))
        };
        let state = state(Grammars::new(load));
        let places = state.compiling.clone();
        let fields = ConstraintFields {
            guided_regex: Some("a+".to_owned()),
            ..ConstraintFields::default()
        };
        let given = fields.check(8).expect("a grammar");
        let key = key(Limits {
            concurrent_requests: NonZeroU32::new(1),
            ..Limits::default()
        });
        let (in_use, _) = key.begin(Instant::now()).expect("the only one");
        let held = Held::of_key(in_use);
        let client = tokio::spawn(async move { given.prepare(&state, (held, None)).await.is_ok() });
        compiling.await.expect("it begins");
        client.abort();
        assert!(client.await.expect_err("it was stopped").is_cancelled());
        assert_eq!(places.available_permits(), COMPILED_AT_ONCE - 1, "the compiler runs");
        assert!(key.begin(Instant::now()).is_err(), "the key has no second place");
        drop(open_gate);
        let all = u32::try_from(COMPILED_AT_ONCE).expect("a few");
        let _all = places.acquire_many(all).await.expect("places are never closed");
        let deadline = Instant::now() + PATIENCE;
        while key.begin(Instant::now()).is_err() {
            assert!(Instant::now() < deadline, "the key's place never came back");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}
