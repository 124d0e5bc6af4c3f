//! Compiled grammars, each once as long as it is in use.

use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use serde_json::Value;
use serving_core::request::OutputGrammar;

use crate::recent::Recent;
use crate::{GrammarError, Vocabulary};

/// Grammars that are kept compiled. Clients use a few again and again.
const COMPILED_MAX: usize = 32;
/// One state takes 1 to 2 KiB, so a grammar takes at most about 40 MiB. The schemas of the acceptance tests have below 1,000.
const LEXER_STATES_MAX: usize = 20_000;
/// Between the parts of an object or a list. JSON allows more white space. A small model would write it until its budget of
/// tokens is used up.
const ITEM_SEPARATOR: &str = ", ?";
const KEY_SEPARATOR: &str = ": ?";

type Load = dyn Fn() -> Result<Vocabulary, GrammarError> + Send + Sync;

/// Compiles grammars for one model. The vocabulary is built when the first one comes: it takes a few bytes for each byte of the
/// tokens, and most servers never need it.
pub struct Grammars {
    load: Box<Load>,
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
    compiled: Mutex<Recent<OutputGrammar, Matcher>>,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_loaded = self.factory.get().is_some();
        f.debug_struct("Grammars")
            .field("is_loaded", &is_loaded)
            .finish_non_exhaustive()
    }
}

impl Grammars {
    pub fn new(load: impl Fn() -> Result<Vocabulary, GrammarError> + Send + Sync + 'static) -> Self {
        Self {
            load: Box::new(load),
            factory: OnceLock::new(),
            compiled: Mutex::new(Recent::new(COMPILED_MAX)),
        }
    }

    /// For a node that knows no tokens: every grammar is refused.
    pub fn unknown() -> Self {
        Self::new(|| Err(GrammarError::NoVocabulary("this process has no model file".to_owned())))
    }

    /// Compiles a grammar, so that [`Self::start`] has it at hand. Takes up to some 50 ms of a core, and the first call the time
    /// to read the vocabulary: not for a thread that others wait for.
    ///
    /// # Errors
    /// What is wrong with the grammar, or that no vocabulary is known.
    pub fn compile(&self, grammar: &OutputGrammar) -> Result<(), GrammarError> {
        self.start(grammar).map(drop)
    }

    /// A sequence at its first token.
    pub(crate) fn start(&self, grammar: &OutputGrammar) -> Result<Matcher, GrammarError> {
        if let Some(compiled) = self.compiled().get(grammar) {
            return Ok(compiled.clone());
        }
        let factory = self
            .factory
            .get_or_init(|| (self.load)().and_then(|known| factory(&known)));
        let factory = factory.as_ref().map_err(Clone::clone)?;
        let mut matcher = Matcher::new(factory.create_parser(top_level(grammar)?));
        if let Some(error) = matcher.get_error() {
            return Err(GrammarError::Invalid(error));
        }
        // The first mask is the most expensive one. It also finds grammars that nothing can follow.
        let first = matcher.compute_mask_or_eos();
        first.map_err(|error| GrammarError::Invalid(error.to_string()))?;
        self.compiled().insert(grammar.clone(), matcher.clone());
        Ok(matcher)
    }

    fn compiled(&self) -> std::sync::MutexGuard<'_, Recent<OutputGrammar, Matcher>> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn factory(vocabulary: &Vocabulary) -> Result<ParserFactory, GrammarError> {
    let factory = ParserFactory::new_simple(&vocabulary.tokens);
    let mut factory = factory.map_err(|error| GrammarError::NoVocabulary(error.to_string()))?;
    factory.quiet();
    *factory.limits_mut() = ParserLimits {
        max_lexer_states: LEXER_STATES_MAX,
        ..ParserLimits::default()
    };
    Ok(factory)
}

fn top_level(grammar: &OutputGrammar) -> Result<TopLevelGrammar, GrammarError> {
    Ok(match grammar {
        OutputGrammar::JsonSchema(text) => {
            let schema = serde_json::from_str(text);
            let schema: Value = schema.map_err(|error| GrammarError::Invalid(error.to_string()))?;
            if !schema.is_object() {
                let wrong = "a JSON schema must be an object".to_owned();
                return Err(GrammarError::Invalid(wrong));
            }
            TopLevelGrammar::from_json_schema(with_our_options(schema))
        }
        OutputGrammar::Regex(text) => TopLevelGrammar::from_regex(text),
        OutputGrammar::Lark(text) => TopLevelGrammar::from_lark(text.to_string()),
    })
}

/// The parser reads options out of the schema, so they are ours, whatever the client wrote there.
fn with_our_options(mut schema: Value) -> Value {
    let options = JsonCompileOptions {
        item_separator: ITEM_SEPARATOR.to_owned(),
        key_separator: KEY_SEPARATOR.to_owned(),
        whitespace_flexible: false,
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    schema
}
