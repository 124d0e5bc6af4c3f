//! Work on a text: a short text is handled in place, a long one on a blocking thread. At most as many of these threads run
//! as there are cores.

use super::AppState;
use super::body::Held;
use super::error::ApiError;
use super::limits::TOKENIZE_INLINE_BYTES_MAX;

/// The work holds its place, the body's bytes and the request's place among those of its key. A client that leaves does not end
/// the work, and must not make room for another.
pub async fn on_text<T: Send + 'static>(
    state: &AppState,
    (bytes, held): (usize, Held),
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if bytes <= TOKENIZE_INLINE_BYTES_MAX {
        return work();
    }
    let place = state.long_texts.clone().acquire_owned().await;
    let place = place.map_err(|_| ApiError::internal("the tokenizer is shut down"))?;
    let joined = tokio::task::spawn_blocking(move || {
        let done = work();
        drop((place, held));
        done
    });
    joined
        .await
        .map_err(|_| ApiError::internal("the tokenizer broke on this text; please report it"))?
}
