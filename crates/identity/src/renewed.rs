//! Certificates whose files are read again when they change.

use std::fmt;
use std::path::Path;
use std::time::Duration;

/// A certificate in files. Clones share what was read last.
pub trait Renewed: Clone + fmt::Debug + Send + Sync + 'static {
    type Error: std::error::Error + Send;

    /// The files of it, to see whether they changed. None: there is no certificate.
    fn paths(&self) -> Vec<&Path>;

    /// The certificate that new connections use, in DER.
    fn certificate(&self) -> Option<Vec<u8>>;

    /// Whether the certificate is good at this time after the beginning of 1970.
    fn is_valid_at(&self, time: Duration) -> bool;

    /// Reads the files again. New connections use what they hold now.
    ///
    /// # Errors
    /// As when they were opened; then everything stays as it was.
    fn read_again(&self) -> Result<(), Self::Error>;
}
