//! `cvt`: between integers, between floating-point formats, and from one to the other.

use crate::number::float::{NAN_F32, clamped, flushed, output_f64};
use crate::number::half::{BF16, F16, Rounding};
use crate::types::Type;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conversion {
    pub(crate) from: Type,
    pub(crate) to: Type,
    /// Of a float result that is not exact.
    pub(crate) rounding: Rounding,
    /// `.rni` and its like: rounds to an integral value first.
    pub(crate) to_integral: Option<Rounding>,
    pub(crate) is_flushed: bool,
    pub(crate) is_saturated: bool,
}

impl Conversion {
    /// The bits of the result. A signed result is extended to 64 bits.
    pub(crate) fn apply(&self, bits: u64) -> u64 {
        match (self.from.is_float(), self.to.is_float()) {
            (true, true) => self.float_to_float(bits),
            (true, false) => self.float_to_integer(bits),
            (false, true) => self.integer_to_float(bits),
            (false, false) => self.integer_to_integer(self.from.value(bits)),
        }
    }

    fn float_input(&self, bits: u64) -> f64 {
        let value = match self.from {
            Type::F16 => F16.widen(bits as u16),
            Type::Bf16 => BF16.widen(bits as u16),
            Type::F32 if self.is_flushed => flushed::<true>(f32::from_bits(bits as u32)),
            Type::F32 => f32::from_bits(bits as u32),
            _ => return f64::from_bits(bits),
        };
        f64::from(value)
    }

    fn float_to_float(&self, bits: u64) -> u64 {
        let value = self.float_input(bits);
        let value = self.to_integral.map_or(value, |rounding| integral(value, rounding));
        self.float_output(value)
    }

    fn float_output(&self, value: f64) -> u64 {
        match self.to {
            Type::F16 => u64::from(F16.round(value, self.rounding)),
            Type::Bf16 => u64::from(BF16.round(value, self.rounding)),
            Type::F32 => {
                let value = value as f32;
                let value = if self.is_saturated { clamped(value) } else { value };
                let value = if self.is_flushed { flushed::<true>(value) } else { value };
                let bits = if value.is_nan() { NAN_F32 } else { value.to_bits() };
                u64::from(bits)
            }
            _ => output_f64(value),
        }
    }

    /// Values out of range become the nearest in range. NaN: PTX ISA, "cvt": 0, but the highest bit alone where a 64-bit
    /// type takes part.
    fn float_to_integer(&self, bits: u64) -> u64 {
        let value = self.float_input(bits);
        if value.is_nan() {
            let is_wide = self.from == Type::F64 || self.to.bytes() == 8;
            return if is_wide {
                self.to.value(1 << (self.to.bits() - 1)) as u64
            } else {
                0
            };
        }
        let (lowest, highest) = self.to.range();
        let integer = integral(value, self.to_integral.unwrap_or(Rounding::Zero)) as i128;
        integer.clamp(lowest, highest) as u64
    }

    fn integer_to_float(&self, bits: u64) -> u64 {
        let value = self.from.value(bits);
        match self.to {
            Type::F32 => u64::from((value as f32).to_bits()),
            Type::F64 => (value as f64).to_bits(),
            _ => self.float_output(value as f64),
        }
    }

    fn integer_to_integer(&self, value: i128) -> u64 {
        if self.is_saturated {
            let (lowest, highest) = self.to.range();
            return value.clamp(lowest, highest) as u64;
        }
        self.to.value(value as u64) as u64
    }
}

fn integral(value: f64, rounding: Rounding) -> f64 {
    match rounding {
        Rounding::Nearest => value.round_ties_even(),
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
    }
}
