//! What the fuzz targets call: messages that only the two ends of a transport understand. What is no message is an error, what is
//! one survives a round trip, and memory is mapped only where its announced shape is the true one.

/// A message on the socket of a pair that shares memory, before the first frame.
///
/// # Panics
/// Something of that does not hold.
pub fn check_greeting(bytes: &[u8]) {
    crate::transports::shm::hostile::check(bytes);
    crate::transports::cuda_ipc::hostile::check(bytes);
}

/// A message on the control stream of a pair that uses NCCL.
///
/// # Panics
/// Something of that does not hold.
pub fn check_nccl_message(bytes: &[u8]) {
    crate::transports::nccl::hostile::check(bytes);
}
