//! Constrained outputs on a node: each step's rows get the tokens that they may draw. Grammars are compiled before their request
//! reaches the loop, so that neither the loop nor a step waits for it.

use std::path::PathBuf;
use std::sync::Arc;

use engine::Step;
use grammar::{CompiledGrammar, GrammarError, Grammars, Places, Vocabulary};
use model_files::model::Model;
use proto::messages::{RefuseReason, Refused};
use serving_core::ids::{ChoiceIndex, TokenId};
use serving_core::request::Request;

use crate::handle::Handle;

/// Grammars that a node compiles at a time: the others wait, so that its engine has a core.
pub(crate) const COMPILED_AT_ONCE: usize = 1;

/// The grammars of a node that serves this model. Its tokenizer is read when the first grammar comes.
pub(crate) fn grammars_of(model: Option<PathBuf>) -> Grammars {
    let Some(path) = model else {
        return Grammars::unknown();
    };
    Grammars::new(move || {
        let unknown = |error: &dyn std::fmt::Display| GrammarError::NoVocabulary(error.to_string());
        let model = Model::open(&path).map_err(|error| unknown(&error))?;
        let tokenizer = model.tokenizer().map_err(|error| unknown(&error))?;
        let size = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        Vocabulary::new(size, tokenizer.end_tokens(), |token: TokenId| {
            Some((tokenizer.token_bytes(token)?, tokenizer.is_special(token)))
        })
    })
}

/// Says which tokens the rows of a step may draw. A row whose outputs do not fit its grammar draws none, and its request fails.
pub(crate) fn restrict(step: &mut Step, places: &mut Places) {
    for row in 0..step.rows().len() {
        let Some((constrained, outputs)) = step.constrained(row) else {
            continue;
        };
        // All choices of a row have the same outputs.
        let first_choice = constrained.draws.as_ref().map_or(0, |draws| draws.choices.start);
        let sequence = (constrained.key, ChoiceIndex(first_choice));
        match places.allowed(sequence, &constrained.request.constraint, outputs) {
            Ok(allowed) => step.allow_only(row, allowed),
            Err(error) => {
                tracing::warn!(request_id = %constrained.key.request, %error, "an output lost its grammar; its request fails");
                step.allow_only(row, &[]);
            }
        }
    }
}

impl Handle {
    /// Compiles the request's grammar, if it has one. Its stream has to keep the result. The coordinator has compiled it, too: a
    /// refusal means that the two differ.
    ///
    /// # Errors
    /// The grammar cannot be compiled here.
    pub async fn prepare(&self, request: &Request) -> Result<Option<Arc<CompiledGrammar>>, Refused> {
        let Some(grammar) = request.constraint.grammar.clone() else {
            return Ok(None);
        };
        let _place = self.compiling.acquire().await;
        let grammars: Arc<Grammars> = self.grammars.clone();
        let compiled = tokio::task::spawn_blocking(move || grammars.compile(&grammar)).await;
        let detail = match compiled {
            Ok(Ok(compiled)) => return Ok(Some(compiled)),
            Ok(Err(error)) => format!("its grammar cannot be compiled: {error}"),
            Err(error) => format!("compiling its grammar broke: {error}"),
        };
        let reason = RefuseReason::Invalid;
        Err(Refused { reason, detail })
    }
}
