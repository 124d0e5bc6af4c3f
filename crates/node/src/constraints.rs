//! Constrained outputs on a node: the tokens that each step's rows may draw are worked out while the engine computes the step.
//! Grammars are compiled before their request reaches the loop, so that neither the loop nor a step waits for it.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use engine::{AllowedTokens, Step, StepRow};
use grammar::{CompiledGrammar, GrammarError, Grammars, Places, Vocabulary};
use model_files::model::Model;
use proto::messages::{RefuseReason, Refused};
use serving_core::ids::{ChoiceIndex, TokenId};
use serving_core::request::{AttemptKey, Request};

use crate::handle::Handle;

/// Grammars that a node compiles at a time: the others wait, so that its engine has a core.
pub(crate) const COMPILED_AT_ONCE: usize = 1;

/// The grammars of a node that serves this model. Its tokenizer is read after the node's start, or for the first grammar.
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

/// The thread that works out which tokens the rows of a step may draw, while the engine computes the step. It ends soon after the
/// engine's thread.
#[derive(Debug)]
pub(crate) struct AllowedThread(SyncSender<Job>);

/// The constrained rows of a step.
#[derive(Debug)]
struct Job {
    rows: Vec<ConstrainedRow>,
    answer: SyncSender<AllowedTokens>,
}

#[derive(Debug)]
struct ConstrainedRow {
    index: usize,
    sequence: (AttemptKey, ChoiceIndex),
    request: Arc<Request>,
    outputs: Vec<TokenId>,
}

impl AllowedThread {
    /// # Errors
    /// The system starts no thread.
    pub(crate) fn start(mut places: Places) -> io::Result<Self> {
        // At most one step is under way.
        let (jobs, asked) = sync_channel::<Job>(1);
        let thread = std::thread::Builder::new().name("allowed-tokens".to_owned());
        thread.spawn(move || {
            while let Ok(job) = asked.recv() {
                let allowed = allowed(&job.rows, &mut places);
                // A step that was refused does not ask.
                let _ = job.answer.send(allowed);
            }
        })?;
        Ok(Self(jobs))
    }

    /// A row whose outputs do not fit its grammar will draw nothing, and its request fails. `None`: the thread has ended, which only
    /// a panic does.
    pub(crate) fn restrict(&self, step: &mut Step) -> Option<()> {
        let row = |(index, row, outputs): (usize, &StepRow, &[TokenId])| {
            // All choices of a row have the same outputs.
            let first_choice = row.draws.as_ref().map_or(0, |draws| draws.choices.start);
            ConstrainedRow {
                index,
                sequence: (row.key, ChoiceIndex(first_choice)),
                request: row.request.clone(),
                outputs: outputs.to_vec(),
            }
        };
        let rows: Vec<ConstrainedRow> = step.constrained().map(row).collect();
        if rows.is_empty() {
            return Some(());
        }
        let (answer, coming) = sync_channel(1);
        self.0.send(Job { rows, answer }).ok()?;
        step.await_allowed(coming);
        Some(())
    }
}

fn allowed(rows: &[ConstrainedRow], places: &mut Places) -> AllowedTokens {
    let mut all = AllowedTokens::default();
    for row in rows {
        match places.allowed(row.sequence, &row.request.constraint, &row.outputs) {
            Ok(allowed) => all.push(row.index, allowed),
            Err(error) => {
                tracing::warn!(request_id = %row.sequence.0.request, %error, "an output lost its grammar; its request fails");
            }
        }
    }
    all
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
