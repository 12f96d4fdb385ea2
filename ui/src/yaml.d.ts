declare module "js-yaml" {
  export function load(text: string): unknown;
  export function dump(value: unknown, options?: { lineWidth?: number; noRefs?: boolean; flowLevel?: number; sortKeys?: boolean }): string;
  export class YAMLException extends Error {
    reason: string;
    mark?: { line: number; column: number };
  }
}
