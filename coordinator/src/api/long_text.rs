//! Work on a text: in place when it is short, on a blocking thread when it is long, on no more of them than there are cores.

use super::AppState;
use super::body::HeldBytes;
use super::error::ApiError;
use super::limits::TOKENIZE_INLINE_BYTES_MAX;

/// The place and the body's bytes go with the work: a client that leaves does not end it, and must not make room for another.
pub async fn on_text<T: Send + 'static>(
    state: &AppState,
    (bytes, held): (usize, HeldBytes),
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
