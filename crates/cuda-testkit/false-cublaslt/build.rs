//! Gives the library the SONAME of the real one.

#![forbid(unsafe_code)]

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcublasLt.so.13");
    // The driver calls functions of the library, so it stays in the process when its handle is closed.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
