//! The `.global` and `.const` variables of a module, with their initial values. Kernels may read them and never write them.

use crate::ptx::error::Refusal;
use crate::ptx::integers::number;
use crate::ptx::names::Variable;
use crate::types::Type;
use crate::windows;

/// A module with more variables than this is refused.
const IMAGE_BYTES_MAX: usize = 64 << 20;

#[derive(Debug, Default)]
pub(super) struct Image {
    pub(super) bytes: Vec<u8>,
}

impl Image {
    /// Gives the variable's address.
    pub(super) fn add(&mut self, variable: &Variable<'_>) -> Result<u64, Refusal> {
        let bytes = variable.bytes.ok_or(Refusal::Directive)?;
        let at = self.bytes.len().next_multiple_of(variable.align);
        let end = at
            .checked_add(bytes)
            .filter(|end| *end <= IMAGE_BYTES_MAX)
            .ok_or(Refusal::Directive)?;
        self.bytes.resize(end, 0);
        if let Some(initial) = variable.initial {
            fill(&mut self.bytes[at..end], initial, variable.ty)?;
        }
        Ok(windows::IMAGE + at as u64)
    }
}

/// Values in any nesting of braces, in memory order. What has no value stays zero.
fn fill(to: &mut [u8], initial: &str, ty: Type) -> Result<(), Refusal> {
    let mut places = to.chunks_exact_mut(ty.bytes());
    let is_between = |c: char| c.is_whitespace() || matches!(c, '{' | '}' | ',');
    for text in initial.split(is_between).filter(|text| !text.is_empty()) {
        let refused = || Refusal::Operand(text.to_owned());
        let value = match text.split_at_checked(2) {
            Some(("0f" | "0F", digits)) if ty == Type::F32 => u64::from_str_radix(digits, 16).ok(),
            Some(("0d" | "0D", digits)) if ty == Type::F64 => u64::from_str_radix(digits, 16).ok(),
            _ => number(text).filter(|_| !ty.is_float()).map(|value| value as u64),
        };
        let value = value.ok_or_else(refused)?;
        let place = places.next().ok_or_else(refused)?;
        place.copy_from_slice(&value.to_le_bytes()[..ty.bytes()]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn initial_values_lie_in_memory_order() {
        let mut image = Image::default();
        let text = ".align 4 .b8 t[6] = {1, 0xFF, -1}";
        image.add(&Variable::parse(text, &[]).unwrap()).unwrap();
        let address = image
            .add(&Variable::parse(".f32 f[2] = {0f3F800000, 0f40000000}", &[]).unwrap())
            .unwrap();
        assert_eq!(address, windows::IMAGE + 8);
        assert_eq!(image.bytes[..8], [1, 255, 255, 0, 0, 0, 0, 0]);
        assert_eq!(image.bytes[8..], [0, 0, 0x80, 0x3f, 0, 0, 0, 0x40]);
        assert!(image.add(&Variable::parse(".u64 p = other", &[]).unwrap()).is_err());
    }
}
