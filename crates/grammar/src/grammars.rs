//! Compiled grammars: each is compiled once, and kept as long as a request follows it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::Builder;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{JsonCompileOptions, Matcher, ParserFactory};
use serde_json::Value;
use serving_core::ids::PrefixSalt;
use serving_core::request::OutputGrammar;

use crate::recent::Recent;
use crate::{GrammarError, Vocabulary};

/// Grammars that stay compiled without a request. Clients use a few again and again.
const KEPT_MAX: usize = 32;
/// llguidance walks nested rules and chains of references by recursion. This holds the deepest ones of a text of the largest size
/// (`GRAMMAR_BYTES_MAX` of the coordinator and of the wire). Only memory that is used is taken.
const COMPILE_STACK_BYTES: usize = 512 << 20;
/// What a grammar may cost. llguidance's own limits are for a service of one model per process; here a hostile client must not
/// hold up the other streams of a node. Its documentation gives the speeds.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 2_000,
    // 20 ms, on a thread that nobody waits for.
    initial_lexer_fuel: 1_000_000,
    // 3.5 ms and 1 ms for each mask. Usual schemas take 0.05 ms.
    step_lexer_fuel: 50_000,
    step_max_items: 20_000,
    // 1 to 2 KiB each, so up to 40 MiB for a sequence.
    max_lexer_states: 20_000,
    max_grammar_size: 100_000,
    precompute_large_lexemes: true,
    // They would show the parser's state to clients.
    verbose_errors: false,
};
/// Bytes of all regular expressions in a schema together. Each takes up to 6 KiB for a byte while it is compiled.
const PATTERN_BYTES_MAX: usize = 8 << 10;
/// Between the parts of an object or a list. JSON allows more white space. A small model would write it until its budget of
/// tokens is used up.
const ITEM_SEPARATOR: &str = ", ?";
const KEY_SEPARATOR: &str = ": ?";
/// Characters of the parser's words that a client gets to read.
const WORDS_CHARS_MAX: usize = 300;

type Load = dyn Fn() -> Result<Vocabulary, GrammarError> + Send + Sync;

/// A grammar at its first token. While somebody has it, [`Grammars`] finds it.
pub struct CompiledGrammar(Mutex<Matcher>);

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CompiledGrammar")
    }
}

impl CompiledGrammar {
    /// A sequence that follows it. It shares nothing with other sequences: what one of them uses up is not another's loss.
    pub(crate) fn start(&self) -> Matcher {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).deep_clone()
    }
}

/// Who finds a compiled grammar that is kept: requests with the same prefix salt, or those without one.
type Whose = Option<u64>;

#[derive(Debug)]
struct Known {
    /// The last ones that were asked for, over all owners.
    kept: Recent<(Whose, OutputGrammar), Arc<CompiledGrammar>>,
    /// Those that some request follows, too.
    alive: HashMap<OutputGrammar, Vec<(Whose, Weak<CompiledGrammar>)>>,
}

impl Known {
    fn of(&mut self, owned: &(Whose, OutputGrammar)) -> Option<Arc<CompiledGrammar>> {
        if let Some(kept) = self.kept.get(owned) {
            return Some(kept.clone());
        }
        let (whose, grammar) = owned;
        let mut alive = self.alive.get(grammar)?.iter();
        alive.find_map(|(owner, compiled)| compiled.upgrade().filter(|_| owner == whose))
    }

    fn keep(&mut self, owned: (Whose, OutputGrammar), compiled: &Arc<CompiledGrammar>) {
        self.alive.retain(|_, all| {
            all.retain(|(_, compiled)| compiled.strong_count() > 0);
            !all.is_empty()
        });
        let alive = self.alive.entry(owned.1.clone()).or_default();
        alive.push((owned.0, Arc::downgrade(compiled)));
        self.kept.insert(owned, compiled.clone());
    }
}

/// Compiles grammars for one model. The vocabulary is read once: ahead of time ([`Grammars::read_vocabulary_soon`]), or when the
/// first grammar comes. It takes a few bytes for each byte of the tokens.
pub struct Grammars {
    load: Box<Load>,
    factory: OnceLock<Result<ParserFactory, GrammarError>>,
    known: Mutex<Known>,
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
            known: Mutex::new(Known {
                kept: Recent::new(KEPT_MAX),
                alive: HashMap::new(),
            }),
        }
    }

    /// For a node that knows no tokens: every grammar is refused.
    pub fn unknown() -> Self {
        Self::new(|| Err(GrammarError::NoVocabulary("this process has no model file".to_owned())))
    }

    /// Reads the vocabulary on a thread of its own, which takes some tenths of a second, so that the first grammar does not wait
    /// for it. `then` is called afterwards. Why it cannot be read is told to whoever asks for a grammar.
    pub fn read_vocabulary_soon(self: &Arc<Self>, then: impl FnOnce() + Send + 'static) {
        let grammars = self.clone();
        let thread = Builder::new()
            .name("vocabulary".to_owned())
            .stack_size(COMPILE_STACK_BYTES);
        let spawned = thread.spawn(move || {
            let _ = grammars.parsers();
            then();
        });
        // Nobody waits for the thread. Where the system starts none, the first grammar reads the vocabulary.
        drop(spawned);
    }

    /// Compiles a grammar for a request without a salt.
    #[cfg(test)]
    pub(crate) fn compile(&self, grammar: &OutputGrammar) -> Result<Arc<CompiledGrammar>, GrammarError> {
        self.compile_for(None, grammar)
    }

    /// Compiles a grammar, unless it is known. Takes tens of milliseconds, and the first call the time to read the vocabulary:
    /// not for a thread that others wait for. Whoever follows the grammar has to keep the result until the end. Only what was
    /// compiled for the same salt counts as known. So the time that it takes says nothing about the grammars of others.
    ///
    /// # Errors
    /// What is wrong with the grammar, that no vocabulary is known, or that the system starts no thread.
    pub fn compile_for(
        &self,
        whose: Option<PrefixSalt>,
        grammar: &OutputGrammar,
    ) -> Result<Arc<CompiledGrammar>, GrammarError> {
        let owned = (whose.map(|salt| salt.0), grammar.clone());
        if let Some(compiled) = self.known().of(&owned) {
            return Ok(compiled);
        }
        let compiled = Arc::new(self.compile_apart(grammar, COMPILE_STACK_BYTES)?);
        self.known().keep(owned, &compiled);
        Ok(compiled)
    }

    /// A grammar that was compiled and that somebody keeps, whoever that is: it is the same for all. Never compiles.
    pub(crate) fn find(&self, grammar: &OutputGrammar) -> Option<Arc<CompiledGrammar>> {
        let known = self.known();
        let mut alive = known.alive.get(grammar)?.iter();
        alive.find_map(|(_, compiled)| compiled.upgrade())
    }

    /// Compiles on a thread of its own, which has so much stack.
    fn compile_apart(&self, grammar: &OutputGrammar, stack_bytes: usize) -> Result<CompiledGrammar, GrammarError> {
        std::thread::scope(|scope| {
            let thread = Builder::new().name("grammar".to_owned()).stack_size(stack_bytes);
            let work = thread.spawn_scoped(scope, || self.compile_anew(grammar));
            let work = work.map_err(|error| GrammarError::NoThread(error.kind()))?;
            let broke = |_| Err(GrammarError::Invalid("its compiler broke on it".to_owned()));
            work.join().unwrap_or_else(broke)
        })
    }

    fn compile_anew(&self, grammar: &OutputGrammar) -> Result<CompiledGrammar, GrammarError> {
        let mut matcher = Matcher::new(self.parsers()?.create_parser(top_level(grammar)?));
        if let Some(error) = matcher.get_error() {
            return Err(invalid(&error));
        }
        // The first mask is the most expensive one. It also finds grammars that nothing can follow.
        let first = matcher.compute_mask_or_eos();
        first.map_err(|error| invalid(&error.to_string()))?;
        // A second one finds everything prepared, and those that follow the grammar begin with a whole allowance.
        matcher.invalidate_bias_cache();
        let second = matcher.compute_mask_or_eos();
        second.map_err(|error| invalid(&error.to_string()))?;
        Ok(CompiledGrammar(Mutex::new(matcher)))
    }

    /// What makes parsers for the vocabulary. The first call reads it; calls that come meanwhile wait.
    fn parsers(&self) -> Result<&ParserFactory, GrammarError> {
        let factory = self
            .factory
            .get_or_init(|| (self.load)().and_then(|known| factory(&known)));
        factory.as_ref().map_err(Clone::clone)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The parser's words for a client, without the trace of calls that follows a panic of it.
fn invalid(words: &str) -> GrammarError {
    let words = words.split("\n<").next().unwrap_or_default().trim();
    GrammarError::Invalid(words.chars().take(WORDS_CHARS_MAX).collect())
}

fn factory(vocabulary: &Vocabulary) -> Result<ParserFactory, GrammarError> {
    let factory = ParserFactory::new_simple(&vocabulary.tokens);
    let mut factory = factory.map_err(|error| GrammarError::NoVocabulary(error.to_string()))?;
    factory.quiet();
    *factory.limits_mut() = LIMITS;
    Ok(factory)
}

fn top_level(grammar: &OutputGrammar) -> Result<TopLevelGrammar, GrammarError> {
    Ok(match grammar {
        OutputGrammar::JsonSchema(text) => {
            let schema = serde_json::from_str(text);
            let schema: Value = schema.map_err(|error| invalid(&error.to_string()))?;
            if !schema.is_object() {
                return Err(invalid("a JSON schema must be an object"));
            }
            let bytes = pattern_bytes(&schema);
            if bytes > PATTERN_BYTES_MAX {
                return Err(invalid(&format!(
                    "its patterns have {bytes} bytes together, and may have {PATTERN_BYTES_MAX}"
                )));
            }
            TopLevelGrammar::from_json_schema(with_our_options(schema))
        }
        OutputGrammar::Regex(text) => TopLevelGrammar::from_regex(text),
        OutputGrammar::Lark(text) => TopLevelGrammar::from_lark(text.to_string()),
    })
}

/// The bytes of a schema's regular expressions. The reader of JSON limits the depth.
fn pattern_bytes(schema: &Value) -> usize {
    match schema {
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| match (name.as_str(), value) {
                ("pattern", Value::String(pattern)) => pattern.len(),
                ("patternProperties", Value::Object(properties)) => {
                    properties.keys().map(String::len).sum::<usize>() + pattern_bytes(value)
                }
                _ => pattern_bytes(value),
            })
            .sum(),
        Value::Array(values) => values.iter().map(pattern_bytes).sum(),
        _ => 0,
    }
}

/// The parser reads options out of the schema, so they are ours, whatever the client wrote there.
fn with_our_options(mut schema: Value) -> Value {
    let options = JsonCompileOptions {
        item_separator: ITEM_SEPARATOR.to_owned(),
        key_separator: KEY_SEPARATOR.to_owned(),
        whitespace_flexible: false,
        // `oneOf` as `anyOf`: to tell whether exactly one of them fits is beyond a grammar.
        coerce_one_of: true,
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    schema
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::sync_channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_thread_that_the_system_does_not_start_is_not_the_grammars_mistake() {
        // More than an address space has.
        const STACK_BYTES: usize = 1 << 60;
        let compiled = Grammars::unknown().compile_apart(&OutputGrammar::Regex("a".into()), STACK_BYTES);
        assert!(matches!(compiled, Err(GrammarError::NoThread(_))), "{compiled:?}");
    }

    #[test]
    fn the_vocabulary_is_read_ahead_of_the_first_grammar_and_once() {
        let reads = Arc::new(AtomicU32::new(0));
        let counted = reads.clone();
        let grammars = Arc::new(Grammars::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Err(GrammarError::NoVocabulary("a test has none".to_owned()))
        }));
        let (done, is_done) = sync_channel(1);
        grammars.read_vocabulary_soon(move || done.send(()).expect("the test waits"));
        is_done.recv_timeout(Duration::from_secs(20)).expect("it is read");
        assert_eq!(reads.load(Ordering::Relaxed), 1);
        let refused = grammars.compile(&OutputGrammar::Regex("a".into()));
        assert!(matches!(refused, Err(GrammarError::NoVocabulary(_))));
        assert_eq!(reads.load(Ordering::Relaxed), 1);
    }
}
